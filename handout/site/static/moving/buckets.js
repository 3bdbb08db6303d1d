// The step's timeline: eight gradients of 0.5 MB on four ranks, over latency, bandwidth and the size of a bucket.
Moving.start("buckets", "Move it: the same eight gradients on four ranks, on your link and in your buckets", (data, controls) => {
  const alpha = controls.slider("Latency α", [10, 30, 100, 300, 1000], 100, (us) => `${us} µs`);
  const rate = controls.slider("Bandwidth 1/β", [0.25, 0.5, 1, 2, 4, 8], 1, (gb) => `${gb} GB/s`);
  const bucket = controls.slider("Bucket", [1, 2, 3, 4, 5, 6, 7, 8], 1, (n) => `${Moving.number(n * data.bucket_mb, 1)} MB`);
  controls.drawn(440, 190, (picture) => {
    const run = (many) => data[`${alpha.value} ${rate.value} ${many}`];
    const { step_ms, sends } = run(bucket.value), longest = Math.max(...bucket.values.map((n) => run(n).step_ms));
    const ms = 400 / longest, each = data.backward_ms / data.layers;
    picture.words(16, 20, "backward", "soft");
    for (let i = 0; i < data.layers; i++)
      picture.box(16 + i * each * ms, 28, each * ms - 2, 30, Moving.blue, each * ms > 16 ? `${data.layers - 1 - i}` : "");
    picture.words(16, 84, "messages", "soft");
    for (const [start, takes, what] of sends)
      picture.box(16 + start * ms, 92, takes * ms - 2, 30, Moving.orange, takes * ms > 8 * what.length + 8 ? what : "");
    picture.line(16 + step_ms * ms, 22, 16 + step_ms * ms, 140, "line dashed");
    picture.line(16, 140, 424, 140);
    const tick = [0.5, 1, 2, 5, 10, 20, 50].find((t) => longest / t <= 8) || 100;
    for (let t = 0; t <= longest; t += tick) {
      picture.line(16 + t * ms, 140, 16 + t * ms, 145);
      picture.words(16 + t * ms, 160, t ? `${t}` : "0 ms", "soft small", t ? "middle" : "start");
    }
    const best = bucket.values.reduce((a, b) => (run(b).step_ms < run(a).step_ms ? b : a));
    return `Step: ${Moving.number(step_ms)} ms with ${sends.length} ${sends.length === 1 ? "message" : "messages"}; `
      + `${Moving.number(step_ms - data.backward_ms)} ms are not hidden by backward. `
      + `Best here: buckets of ${Moving.number(best * data.bucket_mb, 1)} MB, ${Moving.number(run(best).step_ms)} ms.`;
  });
});
