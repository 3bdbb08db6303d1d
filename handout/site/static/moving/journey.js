// One training step of a 7B model on 16 GPUs, as each chapter changes it: above what it was, below what it is now.
Moving.start("journey", "Move it: one training step, chapter by chapter", (data, controls) => {
  const stop = controls.slider("Step of the way", [...data.stops.keys()], 0, (i) => `${i + 1} of ${data.stops.length}`);
  controls.player(stop, 650, true);
  const colours = [Moving.blue, Moving.orange, Moving.green], holds = [Moving.blue, Moving.green, Moving.orange, Moving.grey];
  const sum = (parts) => Object.values(parts).reduce((a, b) => a + b);
  const longest = Math.max(...data.stops.map((s) => sum(s.seconds))), most = Math.max(...data.stops.map((s) => sum(s.gb)));
  controls.drawn(440, 186, (picture) => {
    const now = data.stops[stop.value];
    const row = (y, parts, scale, kinds, unit) => {
      let x = 16;
      Object.entries(parts).forEach(([name, n], i) => {
        const words = n * scale > 9 * name.length ? name : "";
        picture.box(x, y, n * scale - 1, 36, kinds[i], words, "in small");
        x += n * scale;
      });
      picture.words(Math.min(x + 6, 360), y - 6, unit, "ink bold", x > 340 ? "end" : "start");
    };
    picture.words(16, 20, "a step", "soft");
    row(28, now.seconds, 408 / longest, colours, `${Moving.number(sum(now.seconds))} s`);
    picture.words(16, 96, "memory of a GPU", "soft");
    row(104, now.gb, 408 / most, holds, `${Moving.number(sum(now.gb), 0)} GB`);
    const card = 16 + data.card_gb * 408 / most;
    picture.line(card, 98, card, 148, "line");
    picture.words(card, 164, `${Moving.number(data.card_gb, 0)} GB: an H100`, "soft small", "middle");
    const fits = sum(now.gb) <= data.card_gb;
    return `${now.name}: ${Moving.number(sum(now.seconds))} s a step, ${Moving.number(sum(now.gb), 0)} GB, which ${fits ? "fits" : "does not fit"}.`;
  });
});
