// A mesh of eight ranks: the rank that is chosen, and its group along each axis.
Moving.start("grid", "Click a rank: its groups in a mesh of eight", (data, controls) => {
  const axes = ["data", "pipe", "expert", "tensor"], first = "data 2 × pipe 2 × tensor 2";
  const mesh = controls.menu("Mesh", Object.fromEntries(Object.keys(data).map((name) => [name, name])));
  mesh.value = first;
  const row = controls.box.appendChild(element("div", { class: "moving-ranks", role: "group", "aria-label": "Choose a rank" }));
  let chosen = 0;
  const buttons = [...Array(8).keys()].map((rank) => {
    const button = row.appendChild(element("button", { type: "button" }, `${rank}`));
    button.setAttribute("aria-label", `rank ${rank}`);
    button.addEventListener("click", () => { chosen = rank; controls.draw(); });
    return button;
  });
  controls.drawn(440, 166, (picture) => {
    const { places, groups } = data[mesh.value];
    buttons.forEach((button, rank) => button.setAttribute("aria-pressed", rank === chosen));
    axes.forEach((axis, a) => {
      const y = 6 + 40 * a;
      picture.words(4, y + 21, axis, "ink small");
      groups[axis].forEach((ranks, g) => ranks.forEach((rank) => {
        const x = 60 + 47.5 * rank;
        if (!ranks.includes(chosen)) { picture.frame(x, y, 42, 32, "faint"); picture.words(x + 21, y + 21, "abcdefgh"[g], "soft small", "middle"); }
        else picture.box(x, y, 42, 32, rank === chosen ? Moving.orange : Moving.blue, "abcdefgh"[g]);
      }));
    });
    const place = axes.map((axis, a) => `${axis} ${places[chosen][a]}`).join(", ");
    const said = axes.map((axis) => [axis, groups[axis].find((ranks) => ranks.includes(chosen))])
      .map(([axis, ranks]) => `${axis}: ${ranks.length > 1 ? ranks.join(", ") : "alone"}`);
    return `Rank ${chosen} is at ${place}. Its groups: ${said.join("; ")}.`;
  });
});
