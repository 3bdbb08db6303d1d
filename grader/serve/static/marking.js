// Marks by keyboard. Without JavaScript the form works as it stands.
const form = document.getElementById("marking"), fields = [...form.querySelectorAll("fieldset")];
let at = Math.max(0, fields.findIndex((f) => f.querySelector("[type=number]").value === ""));
const points = () => fields[at].querySelector("[type=number]");
const show = (next) => {
  fields[at].classList.remove("here");
  at = Math.min(fields.length - 1, Math.max(0, next));
  fields[at].classList.add("here");
  fields[at].scrollIntoView({ block: "nearest" });
};
show(at);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const key = event.key, most = Number(fields[at].dataset.most);
  if (key === "Escape") return document.activeElement.blur();
  if (document.activeElement.matches("input, a, button, summary")) return;
  if (key === "j" || key === "k") show(at + (key === "j" ? 1 : -1));
  else if (/^[0-9]$/.test(key)) points().value = Math.min(most, Number(key));
  else if (key === ".") points().value = Math.min(most, Number(points().value) + 0.5);
  else if (key === "c") fields[at].querySelector(".long").focus();
  else if (key === "Enter") form.requestSubmit();
  else if (key === "n" || key === "p") document.querySelector(`a[rel=${key === "n" ? "next" : "prev"}]`)?.click();
  else return;
  event.preventDefault();
});
