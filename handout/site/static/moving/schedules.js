// Pipeline schedules on logical clocks: a forward takes 1, a backward 2, and a v-th of it where there are v chunks.
Moving.start("schedules", "Move it: other schedules, ranks, micro-batches and chunks", (data, controls) => {
  const kind = controls.menu("Schedule", { gpipe: "GPipe", "1f1b": "1F1B", interleaved: "interleaved" });
  const stages = controls.slider("Ranks p", [2, 3, 4], 4);
  const micro = controls.slider("Micro-batches m", [1, 2, 3, 4, 5, 6, 7, 8], 6);
  const chunks = controls.slider("Chunks v", [1], 1);
  const few = (values, wanted) => values.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
  controls.drawn(440, 176, (picture) => {
    const interleaved = kind.value === "interleaved", p = stages.value;
    const many = [1, 2, 3, 4, 5, 6, 7, 8].filter((m) => !interleaved || m % p === 0), parts = interleaved ? [2, 3] : [1];
    if (String(micro.values) !== String(many)) micro.offer(many, few(many, micro.value));
    if (String(chunks.values) !== String(parts)) chunks.offer(parts, parts[0]);
    chunks.input.disabled = !interleaved;
    const m = micro.value, v = chunks.value, run = data[`${kind.value} ${p} ${m} ${v}`], unit = 400 / run.length;
    run.ranks.forEach((actions, rank) => {
      const y = 10 + 34 * rank;
      picture.words(12, y + 19, `${rank}`, "soft small");
      picture.frame(28, y, 400, 28, "faint");
      for (const [back, batch, chunk, start] of actions) {
        const wide = unit * (1 + back) / v;
        const colours = back ? [Moving.orange, Moving.yellow, Moving.grey] : [Moving.blue, Moving.green, Moving.grey];
        picture.box(28 + unit * start, y, wide - 1, 28, colours[chunk], wide > 9 ? `${batch}` : "", "in tiny");
      }
    });
    picture.words(28, 164, interleaved ? "blue, green: forward by chunk; orange, yellow: backward" : "blue: forward; orange: backward; numbers: micro-batches", "soft small");
    return `Length ${Moving.number(run.length)}, of which ${3 * m} are work: the bubble is ${Moving.number(100 * run.bubble, 1)} % of the work. `
      + `Rank 0 keeps at most ${run.live[0]} ${interleaved ? "activations of a chunk" : "activations"}.`;
  });
});
