// A page opened from a disk may not fetch others: search then lists titles without their first lines.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// What scrolls sideways can be scrolled by keys: it takes its turn with Tab.
addEventListener("load", () => {
  for (const box of document.querySelectorAll("article pre, article .table-wrapper, article math"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
});
