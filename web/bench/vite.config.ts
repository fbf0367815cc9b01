// Builds the benchmark like the page itself; it is not part of the wheel.
import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

export default defineConfig({
  root: "bench",
  base: "./",
  plugins: [react()],
  build: { target: "es2022", modulePreload: false },
});
