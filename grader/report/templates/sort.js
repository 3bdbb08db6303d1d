// Sorts a table by a click on a heading. Without JavaScript the table stands as it is, sorted by name.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, i) => row.cells[i].dataset.v ?? row.cells[i].textContent.trim();
  heads.forEach((head, i) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const body = table.tBodies[0];  // not there yet when this is read
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = [...body.rows].map((row) => [value(row, i), row]);
      const numeric = keyed.every(([v]) => v !== "" && !isNaN(v));
      keyed.sort(([a], [b]) => (numeric ? a - b : a.localeCompare(b)) * (down ? -1 : 1));
      body.append(...keyed.map(([, row]) => row));
    });
  });
}
