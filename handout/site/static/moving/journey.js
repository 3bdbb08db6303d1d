// One training step of a 7B model on 16 GPUs, as each chapter changes it: above what it was, below what it is now.
Moving.start("journey", "Move it: one training step, chapter by chapter", (data, controls) => {
  const stop = controls.slider("Step of the way", [...data.stops.keys()], 0, (i) => `${i + 1} of ${data.stops.length}`);
  controls.player(stop, 650, true);
  const colours = [Moving.blue, Moving.orange, Moving.green], holds = [Moving.blue, Moving.green, Moving.orange, Moving.grey];
  const sum = (parts) => Object.values(parts).reduce((a, b) => a + b);
  const longest = Math.max(...data.stops.map((s) => sum(s.seconds))), most = Math.max(...data.stops.map((s) => sum(s.gb)));
  controls.drawn(440, 212, (picture) => {
    const now = data.stops[stop.value];
    const row = (y, title, parts, scale, kinds) => {
      let x = 16;
      picture.words(16, y - 8, title, "ink bold");
      Object.entries(parts).forEach(([name, n], i) => {
        const words = n * scale > 9 * name.length ? name : n * scale > 13 ? name[0] : "";
        picture.box(x, y, n * scale - 1, 36, kinds[i], words, "in small");
        x += n * scale;
      });
    };
    row(28, `A step: ${Moving.number(sum(now.seconds))} s`, now.seconds, 408 / longest, colours);
    row(104, `Memory of a GPU: ${Moving.number(sum(now.gb), 0)} GB`, now.gb, 408 / most, holds);
    const card = 16 + data.card_gb * 408 / most;
    picture.line(card, 101, card, 148, "line");
    picture.words(card, 164, `${Moving.number(data.card_gb, 0)} GB: an H100`, "soft small", "middle");
    picture.words(16, 188, "w: waits for messages, o: optimizer's step or its state", "soft small");
    picture.words(16, 205, "p: parameters, g: gradients, a: activations and buffers", "soft small");
    const fits = sum(now.gb) <= data.card_gb;
    return `${now.name}: ${Moving.number(sum(now.seconds))} s a step, ${Moving.number(sum(now.gb), 0)} GB, which ${fits ? "fits" : "does not fit"}.`;
  });
});
