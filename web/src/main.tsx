// Starts the page: live against its server, or from the runs inside an exported file.
import "./text/language"; // before anything that formats numbers
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { adoptBuckets } from "./colour/sheet";
import { SAVED_ID, type Saved } from "./export/html";
import { noHistory, openHistory, type History } from "./state/history";
import { createPage, freeze, goLive, PageContext } from "./state/page";
import { App } from "./views/App";
import "uplot/dist/uPlot.min.css";
import "./style/index.css";

async function start(): Promise<void> {
  adoptBuckets(document);
  const saved = document.getElementById(SAVED_ID);
  const page = createPage(saved ? noHistory() : await history(), document.baseURI);
  if (saved) freeze(page, JSON.parse(saved.textContent) as Saved);
  const root = document.getElementById("page");
  if (!root) throw new Error("the document has no element for the page");
  createRoot(root).render(
    <StrictMode>
      <PageContext value={page}>
        <App />
      </PageContext>
    </StrictMode>,
  );
  if (!saved) await goLive(page);
}

/** Some browsers forbid storage in private windows; the page then works without a history. */
async function history(): Promise<History> {
  try {
    return await openHistory(indexedDB);
  } catch {
    return noHistory();
  }
}

void start();
