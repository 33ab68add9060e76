// Light or dark: what the system prefers, until the button says otherwise; that is remembered.

const KEY = "gemmery-lab-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

// A browser may forbid storage, above all to files; then the choice lasts as long as the page.
function stored(value) {
  try {
    if (value !== undefined) localStorage.setItem(KEY, value);
    return localStorage.getItem(KEY);
  } catch {
    return value ?? null;
  }
}

export function theme(button, changed) {
  let chosen = stored();
  function show() {
    const now = chosen ?? (dark.matches ? "dark" : "light");
    if (chosen) document.documentElement.dataset.theme = chosen;
    button.textContent = now === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${now === "dark" ? "light" : "dark"} colours`);
    changed();
  }
  button.addEventListener("click", () => {
    chosen = button.textContent.toLowerCase();
    stored(chosen);
    show();
  });
  dark.addEventListener("change", show);
  show();
}
