// The roofline of a product (m × k) · (k × n) in 16 bits. The formula is that of lab/measure/roofline.py: a test compares.
Moving.start("layers", "Move it, or type your own sizes: the product of an m × k and a k × n matrix in 16 bits", (data, controls) => {
  const sizes = [...Array(15).keys()].map((i) => 2 ** i);
  const device = controls.menu("Device", Object.fromEntries(Object.keys(data).map((name) => [name, name])));
  const [m, k, n] = [..."mkn"].map((name) => controls.typed(controls.slider(name, sizes, 4096), `${name}, any number`, 1e6));
  controls.drawn(440, 270, (picture) => {
    const [peak, bandwidth] = data[device.value];
    if (isNaN(m.value + k.value + n.value)) return "m, k and n are whole numbers from 1 to 1,000,000.";
    const flops = 2 * m.value * k.value * n.value, bytes = 2 * (m.value * k.value + k.value * n.value + m.value * n.value);
    const intensity = flops / bytes, seconds = Math.max(flops / peak, bytes / bandwidth), ridge = peak / bandwidth;
    const x = (i) => 60 + 340 * Math.log10(i / 0.1) / 5, y = (f) => 216 - 180 * Math.log10(f / 1e11) / 5;
    for (const f of [1e11, 1e12, 1e13, 1e14, 1e15, 1e16]) {
      picture.line(60, y(f), 400, y(f), "faint");
      picture.words(54, y(f) + 4, Moving.withPrefix(f, ""), "soft small", "end");
    }
    for (const i of [0.1, 1, 10, 100, 1000, 10000]) picture.words(x(i), 234, i.toLocaleString("en"), "soft small", "middle");
    picture.words(240, 258, "FLOPs a byte", "soft", "middle");
    picture.words(8, 18, "FLOP/s", "soft");
    picture.curve([[x(0.1), y(0.1 * bandwidth)], [x(ridge), y(peak)], [x(1e4), y(peak)]]);
    picture.line(x(ridge), y(peak), x(ridge), 216, "line dashed");
    picture.words(x(ridge) + 4, 210, `ridge ${Moving.number(ridge, 0)}`, "soft small");
    picture.add("circle", { cx: x(Math.min(intensity, 1e4)), cy: y(flops / seconds), r: 7, fill: Moving.orange, class: "rim" });
    return `${Moving.withPrefix(flops, "FLOP")}, ${Moving.withPrefix(bytes, "B")}: ${Moving.number(intensity, 1)} FLOPs a byte. At least ${Moving.withPrefix(seconds, "s")}, `
      + `bound by ${intensity < ridge ? "memory" : "arithmetic"}, at ${Moving.number(100 * flops / seconds / peak, 1)} % of the peak.`;
  });
});
