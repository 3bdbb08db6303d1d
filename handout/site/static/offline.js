// A page opened from a disk may not fetch others: search then lists titles without their first lines.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
