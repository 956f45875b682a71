"use strict";
(() => {
  const form = document.getElementById("filter");
  const findings = [...document.querySelectorAll(".finding")].map((node) => ({
    node,
    groups: [...node.querySelectorAll(".group")].map((details) => ({ details, text: details.textContent.toLowerCase() })),
    text: node.querySelector("summary").textContent.toLowerCase(),
  }));
  const total = findings.reduce((sum, finding) => sum + finding.groups.length, 0);

  function apply() {
    const wanted = form.elements.text.value.trim().toLowerCase();
    const provider = form.elements.provider.value;
    let shown = 0;
    for (const { node, groups, text } of findings) {
      const chosen = !provider || node.dataset.provider === provider;
      let any = false;
      for (const group of groups) {
        const visible = chosen && (group.text.includes(wanted) || text.includes(wanted));
        group.details.hidden = !visible;
        any ||= visible;
        shown += visible;
      }
      node.hidden = !any;
      // What was searched for should not stay folded.
      if (wanted && any) node.open = true;
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
    for (let node = target.closest("details"); node; node = node.parentElement.closest("details")) node.open = true;
    target.scrollIntoView();
  }

  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.elements.toggle.addEventListener("click", (event) => {
    const open = event.target.textContent === "Open all";
    for (const { node, groups } of findings) {
      node.open = open;
      for (const { details } of groups) details.open = open && !details.hidden;
    }
    event.target.textContent = open ? "Close all" : "Open all";
  });
  addEventListener("hashchange", reveal);
  form.hidden = false;
  apply();
  reveal();
})();
