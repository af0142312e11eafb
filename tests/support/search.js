// `node search.js SITE`: reads a query per line, and writes the pages that the site's own search shows for it, best first.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const site = process.argv[2];
const nothing = () => {};
// Just enough of a browser for the search to load; what it shows is not asked for.
const browser = {
  console,
  document: { documentElement: { dataset: {} }, addEventListener: nothing, getElementById: () => null },
  DOCUMENTATION_OPTIONS: {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  _ready: nothing,
  _: (text) => text, // translates
};
browser.window = browser;
vm.createContext(browser);
for (const name of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"]) {
  const code = fs.readFileSync(path.join(site, name), "utf8").replace(/^const Search = /m, "var Search = ");
  vm.runInContext(code, browser, { filename: name });
}
for (const query of fs.readFileSync(0, "utf8").split("\n").filter(Boolean)) {
  browser.query = query;
  const results = vm.runInContext("Search._performSearch(...Search._parseQuery(query))", browser);
  console.log(results.reverse().map((result) => result[0]).join(" ")); // a page shows them from the end
}
