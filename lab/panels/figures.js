// Plotly figures of a panel, drawn in place. plotly.js (4.6 MB) is asked of the kernel once for a page, so that
// neither a second panel nor a saved notebook carries it.

let plotly; // a promise of the library, one for the page

function load(model) {
  plotly ??= new Promise((resolve, reject) => {
    if (globalThis.Plotly) return resolve(globalThis.Plotly);
    const receive = (message, buffers) => {
      if (message?.kind !== "plotly.js") return;
      model.off("msg:custom", receive);
      const address = URL.createObjectURL(new Blob([buffers[0]], { type: "text/javascript" }));
      import(address).then(
        (library) => resolve(library.default),
        (problem) => { plotly = undefined; reject(problem); },
      );
    };
    model.on("msg:custom", receive);
    model.send({ kind: "plotly.js" });
  });
  return plotly;
}

// JupyterLab says its theme on the body; elsewhere the system's setting counts.
function isDark() {
  const light = document.body.dataset.jpThemeLight;
  if (light !== undefined) return light === "false";
  if (document.body.dataset.vscodeThemeKind) return document.body.dataset.vscodeThemeKind.includes("dark");
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function followTheme(model) {
  const tell = () => {
    if (model.get("dark") === isDark()) return;
    model.set("dark", isDark());
    model.save_changes();
  };
  tell();
  const observer = new MutationObserver(tell);
  observer.observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  return () => observer.disconnect();
}

const CONFIG = { displaylogo: false, responsive: true, showSendToCloud: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };

async function render({ model, el }) {
  const stopFollowing = followTheme(model);
  el.classList.add("metal-lab-figures");
  const shown = new Map(); // place -> what is drawn there
  let drawing = Promise.resolve();
  let gone = false;

  // With a control of the panel focused, JupyterLab's single-letter shortcuts would still act on the notebook.
  requestAnimationFrame(() => {
    const panel = el.closest(".metal-lab-panel");
    if (panel) panel.dataset.lmSuppressShortcuts = "true";
  });

  const draw = async () => {
    const library = await load(model);
    const figures = model.get("figures");
    while (el.children.length > figures.length) {
      library.purge(el.lastElementChild);
      shown.delete(el.children.length - 1);
      el.lastElementChild.remove();
    }
    for (const [place, { figure, label }] of figures.entries()) {
      if (gone) return;
      const box = el.children[place] ?? el.appendChild(document.createElement("div"));
      box.setAttribute("role", "img");
      box.setAttribute("aria-label", label);
      if (shown.get(place) === figure) continue;
      shown.set(place, figure);
      const { data, layout } = JSON.parse(figure);
      await library.react(box, data, layout, CONFIG);
    }
    el.dataset.drawn = model.get("serial");
  };
  const request = () => {
    drawing = drawing.then(() => (gone ? undefined : draw())).catch((problem) => {
      el.dataset.problem = String(problem);
      console.error(problem);
    });
  };
  model.on("change:serial", request);
  request();

  return () => {
    gone = true;
    stopFollowing();
    model.off("change:serial", request);
    for (const box of el.children) globalThis.Plotly?.purge(box);
  };
}

export default { render };
