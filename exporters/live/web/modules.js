// Shows the model as a tree in which what is abnormal stands out; a search leaves what matches and the way to it.
let modulesShown = "";

async function drawModules() {
  const found = await ask("modules").catch(() => ({ tree: null }));
  $("modules-part").hidden = !found.tree;
  const now = JSON.stringify(found);
  if (!found.tree || now === modulesShown) return;  // an open one stays open
  const shut = new Map([...document.querySelectorAll("#modules details")].map((d) => [d.dataset.name, d.open]));
  const another = !modulesShown;
  modulesShown = now;
  $("modules").replaceChildren(moduleItem(found.tree, another ? new Map() : shut));
  $("modules-left").textContent = found.left_out ? `and ${counted(found.left_out, "more module")}, in which nothing was found` : "";
  findModules();
}

function moduleItem(node, shut) {
  const mark = make("i", { class: `m${node.state || node.worst}${node.state ? (node.worst > node.state ? " over" : "") : " inner"}` });
  const line = [mark, node.label, node.kind ? make("span", { class: "dim" }, ` ${node.kind}`) : null,
    ...node.incidents.map((n) => make("span", { class: "culprit" }, ` suspect of incident ${n}`)),
    node.state ? make("span", {}, ` since step ${node.since}`) : null,
    ...node.series.map(([quantity, name]) => make("button", { type: "button", class: "link", onclick: (event) => {
      event.preventDefault();
      showSuspects({ suspects: [{ name, quantity, rank: view.rank }], statistic: "norm" });
    } }, ` ${quantity} ${node.name && name.startsWith(`${node.name}.`) ? name.slice(node.name.length + 1) : name}`)),
    node.more ? make("span", { class: "dim" }, ` and ${node.more} more`) : null];
  const item = make("li", { class: `m${node.worst}` });
  item.dataset.name = `${node.name} ${node.kind}`.toLowerCase();
  if (!node.children.length) { item.append(...line.filter((part) => part !== null)); return item; }
  const part = make("details", { open: shut.get(node.name) ?? Boolean(node.worst || !node.name) },
    make("summary", {}, ...line), make("ul", {}, ...node.children.map((child) => moduleItem(child, shut))));
  part.dataset.name = node.name;
  item.append(part);
  return item;
}

function findModules() {
  const wanted = $("find-module").value.trim().toLowerCase();
  let matches = 0;
  const show = (item) => {
    const own = item.dataset.name.includes(wanted);
    matches += own;
    let below = false;
    for (const child of item.querySelectorAll(":scope > details > ul > li")) below = show(child) || below;
    item.hidden = !(own || below);
    const part = item.querySelector(":scope > details");
    if (part && wanted) part.open = below;
    return own || below;
  };
  for (const item of $("modules").children) show(item);
  $("modules-found").textContent = wanted ? `${matches} found` : "";
}

$("find-module").addEventListener("input", findModules);
