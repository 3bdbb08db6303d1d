// Ring collectives, step by step: rows are ranks, columns are chunks.
Moving.start("ring", "Step through it: a tensor of one number a rank", (data, controls) => {
  const op = controls.menu("Collective", { all_reduce: "all-reduce", reduce_scatter: "reduce-scatter", all_gather: "all-gather" });
  const ranks = controls.slider("Ranks W", [2, 3, 4, 5, 6], 4);
  const step = controls.slider("Step", [0, 1, 2, 3, 4, 5, 6], 0);
  controls.player(step);
  controls.drawn(440, 236, (picture) => {
    const world = ranks.value, run = data[`${op.value} ${world}`], last = run.states.length - 1;
    const now = Math.min(step.value, last);
    if (step.values.length !== last + 1) step.offer([...Array(last + 1).keys()], now);
    const sums = data[`all_reduce ${world}`].states.at(-1).rows[0];
    const wide = 340 / world, high = 32, came = new Set(run.states[now].came.map(String));
    for (let chunk = 0; chunk < world; chunk++) picture.words(84 + wide * (chunk + 0.5), 22, `chunk ${chunk}`, "soft small", "middle");
    run.states[now].rows.forEach((row, rank) => {
      const y = 30 + high * rank;
      picture.words(16, y + 20, `rank ${rank}`);
      row.forEach((n, chunk) => {
        const x = 84 + wide * chunk;
        if (n === null) picture.frame(x, y, wide - 4, high - 4);
        else {
          const colour = came.has(`${rank},${chunk}`) ? Moving.orange : n === sums[chunk] ? Moving.blue : Moving.grey;
          picture.box(x, y, wide - 4, high - 4, colour, `${n}`, wide > 70 ? "in" : "in small");
        }
      });
    });
    const reduces = now > 0 && now <= run.reduces;
    const rule = now === 0 ? "Nothing has been sent yet."
      : `Each rank has just received the orange number from the rank before it, and ${reduces ? "added it" : "kept it"}.`;
    const each = last ? run.ms / last : 0;
    return `Step ${now} of ${last}, ${Moving.number(now * each)} ms of ${Moving.number(run.ms)} ms at 100 µs and 1 GB/s for a tensor of 1 MB; `
      + `each rank has sent ${Moving.number(run.sent_kb * now / last, 1)} kB. ${rule}`;
  });
});
