// FlashAttention's tiles as they are visited; beside each row of queries its m, l and acc.
Moving.start("tiles", "Step through it: eight queries and keys, a value a key", (data, controls) => {
  const mask = controls.menu("Mask", { causal: "causal", full: "none" });
  const side = controls.slider("Tile", [1, 2, 4], 2, (n) => `${n} × ${n}`);
  const visit = controls.slider("Visited tiles", [0], 0);
  controls.player(visit, 600);
  controls.drawn(440, 322, (picture) => {
    const visits = data[`${side.value} ${mask.value}`];
    const now = Math.min(visit.value, visits.length);
    if (visit.values.length !== visits.length + 1) visit.offer([...Array(visits.length + 1).keys()], now);
    const cell = 29, left = 36, top = 52, seen = new Set(), rows = {};
    visits.slice(0, now).forEach(({ i, j, rows: kept }) => { seen.add(`${i},${j}`); kept.forEach((row, r) => { rows[i + r] = row; }); });
    const here = visits[now - 1];
    picture.words(left, 18, "keys, with their values v", "soft small");
    data.values.forEach((v, k) => picture.box(left + cell * k, 24, cell - 3, 22, Moving.green, Moving.number(v), "in small"));
    ["m", "l", "acc"].forEach((name, c) => picture.words(300 + 53 * c, 40, name, "ink bold", "middle"));
    data.scores.forEach((row, q) => {
      const y = top + cell * q;
      picture.words(4, y + 18, `q${q}`, "soft small");
      row.forEach((score, k) => {
        const at = [q - q % side.value, k - k % side.value], x = left + cell * k;
        const current = here && here.i === at[0] && here.j === at[1];
        if (mask.value === "causal" && k > q) picture.frame(x, y, cell - 3, cell - 3);
        else if (seen.has(String(at))) picture.box(x, y, cell - 3, cell - 3, current ? Moving.orange : Moving.blue, Moving.number(score), "in small");
        else picture.box(x, y, cell - 3, cell - 3, Moving.grey);
      });
      (rows[q] || []).forEach((n, c) => picture.words(300 + 53 * c, y + 18, Moving.number(n, 3), here && q - q % side.value === here.i ? "ink small bold" : "ink small", "middle"));
    });
    picture.words(left, 304, "orange: in the chip now; blue: done; grey: to come", "soft small");
    if (!here) return `No tile is visited yet, of ${visits.length}. The whole matrix is never in memory.`;
    const [m, l, acc] = here.rows[0];
    return `Tile ${now} of ${visits.length}: query ${here.i} has m = ${Moving.number(m)}, l = ${Moving.number(l, 3)}, acc = ${Moving.number(acc, 3)}; `
      + `acc / l = ${Moving.number(acc / l, 3)}${here.j + side.value >= (mask.value === "causal" ? here.i + side.value : 8) ? ", its output" : ""}.`;
  });
});
