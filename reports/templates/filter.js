"use strict";
(() => {
  const form = document.getElementById("filter");
  const findings = [...document.querySelectorAll(".finding")].map((node) => ({
    node,
    groups: [...node.querySelectorAll("details")].map((details) => ({ details, text: details.textContent.toLowerCase() })),
    text: [...node.querySelectorAll(":scope > h3, :scope > p")].map((part) => part.textContent.toLowerCase()).join(" "),
  }));
  const total = findings.reduce((sum, finding) => sum + finding.groups.length, 0);

  function apply() {
    const wanted = form.elements.text.value.trim().toLowerCase();
    let shown = 0;
    for (const { node, groups, text } of findings) {
      const chosen = ["status", "provider", "operator"].every((name) => {
        const value = form.elements[name].value;
        return !value || node.dataset[name] === value;
      });
      let any = false;
      for (const group of groups) {
        const visible = chosen && (group.text.includes(wanted) || text.includes(wanted));
        group.details.hidden = !visible;
        any ||= visible;
        shown += visible;
      }
      node.hidden = !any;
    }
    form.querySelector("output").textContent = shown === total ? `${total} groups` : `${shown} of ${total} groups`;
  }

  // A link into a folded or filtered group has to show it.
  function reveal() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (!target) return;
    if (target.closest("[hidden]")) {
      form.reset();
      apply();
    }
    if (target instanceof HTMLDetailsElement) target.open = true;
    target.scrollIntoView();
  }

  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.elements.toggle.addEventListener("click", (event) => {
    const open = event.target.textContent === "Open all";
    for (const { groups } of findings) for (const { details } of groups) details.open = open && !details.hidden;
    event.target.textContent = open ? "Close all" : "Open all";
  });
  addEventListener("hashchange", reveal);
  form.hidden = false;
  apply();
  reveal();
})();
