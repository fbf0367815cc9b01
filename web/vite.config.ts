// Builds the page that the Python package ships: one script, one style sheet and fonts.
import { readFileSync } from "node:fs";
import react from "@vitejs/plugin-react";
import { defineConfig, type Plugin } from "vite";

const FONTS = [
  "@fontsource-variable/ibm-plex-sans",
  "@fontsource/ibm-plex-mono",
  "@fontsource-variable/newsreader",
];

/** Vite's own list of licences does not include fonts. */
function fontLicences(): Plugin {
  return {
    name: "font-licences",
    generateBundle() {
      const texts = FONTS.map((name) => readFileSync(`node_modules/${name}/LICENSE`, "utf8"));
      const source = FONTS.map((name, i) => `## ${name}\n\n${texts[i] ?? ""}`).join("\n\n");
      this.emitFile({ type: "asset", fileName: "assets/licenses-fonts.md", source });
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [react(), fontLicences()],
  build: {
    outDir: "../src/clairai/proxy/page",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the page's policy forbids data: fonts
    modulePreload: false,
    license: { fileName: "assets/licenses.md" },
    chunkSizeWarningLimit: 600,
    // One script, because the HTML export embeds the whole page.
    rolldownOptions: { output: { codeSplitting: false } },
  },
  server: {
    port: 5173,
    strictPort: true,
    proxy: Object.fromEntries(
      ["/v1", "/health", "/metrics"].map((path) => [
        path,
        process.env.CLAIRAI_URL ?? "http://127.0.0.1:6969",
      ]),
    ),
  },
});
