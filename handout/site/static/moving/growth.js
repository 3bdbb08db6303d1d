// Bytes on a rank by stage of ZeRO: parameters, gradients and the optimizer's state.
Moving.start("growth", "Move it: your model and your ranks", (data, controls) => {
  const names = Object.keys(data.models);
  const model = controls.slider("Model", names, "7.5 B");
  const ranks = controls.slider("Ranks W", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], 8, (w) => w.toLocaleString("en"));
  const precision = controls.menu("Precision", { mixed: "mixed", float32: "float32" });
  controls.drawn(440, 258, (picture) => {
    const size = data.models[model.value], held = data[`${precision.value} ${ranks.value}`];
    const gb = held.map((parts) => parts.map((n) => n * size / 1e9)), most = Math.max(...gb.flat(), ...gb.map(sum));
    const scale = 400 / most, card = data.gpu_bytes / 1e9;
    gb.forEach((parts, stage) => {
      let x = 16;
      const y = 22 + 54 * stage;
      picture.words(16, y, `${data.stages[stage]}: ${Moving.withPrefix(sum(parts) * 1e9, "B")}${sum(parts) <= card ? ", fits in 80 GB" : ""}`);
      parts.forEach((n, part) => {
        picture.box(x, y + 6, n * scale - 1, 26, [Moving.blue, Moving.green, Moving.orange][part], n * scale > 16 ? "pgs"[part] : "");
        x += n * scale;
      });
    });
    if (card < most) picture.line(16 + card * scale, 26, 16 + card * scale, 220, "line dashed");
    picture.words(16, 246, `p: parameters, g: gradients, s: state${card < most ? "; dashed: 80 GB" : ""}`, "soft small");
    const said = gb.map((parts, stage) => `${data.stages[stage]} ${Moving.withPrefix(sum(parts) * 1e9, "B")}`);
    return `On each of ${ranks.value.toLocaleString("en")} ranks: ${said.join("; ")}.`;
  });
  function sum(parts) { return parts.reduce((a, b) => a + b); }
});
