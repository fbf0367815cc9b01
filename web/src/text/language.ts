// Gives a browser whose language is no language tag, such as `en-US@posix`, one that Intl accepts.
// uPlot formats numbers in the browser's language as soon as it is loaded, and would throw.

try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US", configurable: true });
}
