// What figures that move share: native controls, a drawing, and a line that says in words what it shows.
// A figure's script ends with Moving.start(name, title, draw). It stands below the static picture, which is all there is without scripts and on paper.
"use strict";

const Moving = {
  blue: "#56b4e9", orange: "#e69f00", green: "#2fb98e", yellow: "#f0e442", grey: "#b8bcc2",

  start(name, title, draw) {
    for (const box of document.querySelectorAll(`.moving[data-moving="${name}"]`)) {
      box.prepend(element("p", { class: "moving-title" }, title));
      draw(JSON.parse(box.querySelector("script").textContent), new Controls(box, name));
      box.hidden = false;
    }
  },

  number(x, digits = 2) {
    return Number(x.toFixed(digits)).toLocaleString("en", { maximumFractionDigits: digits }).replace("-", "−");
  },

  withPrefix(x, unit) {
    const [scale, prefix] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [0, "µ"]]
      .find(([least]) => x >= least);
    return `${Moving.number(Number((x / (scale || 1e-6)).toPrecision(3)))} ${prefix}${unit}`;
  },
};

class Controls {
  constructor(box, id) {
    this.box = box;
    this.id = id;
    this.made = 0;
    this.row = box.appendChild(element("div", { class: "moving-controls" }));
  }

  // A slider over `values`; it shows one as `say` puts it. `slider.value` is the value, `slider.offer` changes them.
  slider(label, values, first, say = String) {
    const id = `${this.id}-${++this.made}`;
    const field = this.row.appendChild(element("div", { class: "moving-field" }));
    field.append(element("label", { for: id }, label));
    const input = field.appendChild(element("input", { id, type: "range", min: 0, step: 1 }));
    const shown = field.appendChild(element("output", { for: id }));
    const slider = {
      input,
      get value() { return this.values[Number(input.value)]; },
      set value(wanted) {
        input.value = Math.max(0, this.values.indexOf(wanted));
        input.setAttribute("aria-valuetext", shown.textContent = say(this.value));
      },
      offer(values, wanted) {
        this.values = values;
        input.max = values.length - 1;
        this.value = wanted;
      },
    };
    slider.offer(values, first);
    input.addEventListener("input", () => { slider.value = slider.value; this.draw(); });
    return slider;
  }

  // A field in place of what a slider shows, for any whole number up to `most`: its `value`, or NaN for anything else.
  typed(slider, label, most) {
    const field = element("input", { type: "number", min: 1, max: most, required: "", "aria-label": label, value: slider.value });
    slider.input.nextSibling.replaceWith(field);
    slider.input.addEventListener("input", () => { field.value = slider.value; this.draw(); });
    field.addEventListener("input", () => {
      if (field.validity.valid) slider.value = slider.values.findLast((v) => v <= field.valueAsNumber);
      this.draw();
    });
    return { get value() { return field.validity.valid ? field.valueAsNumber : NaN; } };
  }

  // A menu of {value: words}.
  menu(label, options) {
    const id = `${this.id}-${++this.made}`;
    const field = this.row.appendChild(element("div", { class: "moving-field" }));
    field.append(element("label", { for: id }, label));
    const select = field.appendChild(element("select", { id }));
    for (const [value, words] of Object.entries(options)) select.append(element("option", { value }, words));
    select.addEventListener("change", () => this.draw());
    return select;
  }

  // A button that moves a slider from its first value to its last; none for readers who want less motion.
  // atOnce: it also begins by itself. Keep that below 5 s: what moves for longer must not begin unasked.
  player(slider, ms = 700, atOnce = false) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const button = this.row.appendChild(element("button", { type: "button" }, "Play"));
    let timer = 0;
    const stop = () => { clearInterval(timer); timer = 0; button.textContent = "Play"; };
    const move = (place) => { slider.input.value = place; slider.input.dispatchEvent(new Event("input")); };
    if (atOnce) addEventListener("load", () => button.click());
    button.addEventListener("click", () => {
      if (timer) return stop();
      button.textContent = "Pause";
      if (slider.input.value === slider.input.max) move(0);
      timer = setInterval(() => {
        if (slider.input.value === slider.input.max) stop();
        else move(Number(slider.input.value) + 1);
      }, ms);
    });
  }

  // Call `draw` now and after each change; it draws into an empty `picture` and returns what `picture` shows, in words.
  drawn(width, height, draw) {
    const words = element("p", { class: "moving-words", role: "status", id: `${this.id}-words` });
    const picture = new Drawing(width, height, words.id);
    this.box.append(picture.svg, words);
    this.draw = () => { picture.svg.replaceChildren(); words.textContent = draw(picture); };
    this.draw();
  }
}

class Drawing {
  constructor(width, height, words) {
    this.svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": words });
  }

  box(x, y, width, height, colour, words = "", kind = "in") {
    const wide = Math.max(width, 0.5);
    this.add("rect", { x, y, width: wide, height, rx: Math.min(3, wide / 4), fill: colour });
    if (words !== "") this.words(x + width / 2, y + height / 2 + 5, words, kind, "middle");
  }

  frame(x, y, width, height, kind = "line dashed") { this.add("rect", { x, y, width, height, rx: 3, class: kind }); }

  line(x1, y1, x2, y2, kind = "line") { this.add("path", { d: `M${x1} ${y1}L${x2} ${y2}`, class: kind }); }

  curve(points, kind = "curve") { this.add("path", { d: `M${points.map((p) => p.join(" ")).join("L")}`, class: kind }); }

  words(x, y, said, kind = "ink", anchor = "start") { this.add("text", { x, y, class: kind, "text-anchor": anchor }, said); }

  add(name, attributes, words) { this.svg.append(element(name, attributes, words)); }
}

function element(name, attributes = {}, words = "") {
  const drawn = ["svg", "rect", "path", "text", "circle"].includes(name);
  const made = drawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (words !== "") made.textContent = words;
  return made;
}
