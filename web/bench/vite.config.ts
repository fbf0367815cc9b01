// Takes the benchmark; gives it built like the page itself. It is not part of the wheel.
import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

export default defineConfig({
  root: "bench",
  base: "./",
  plugins: [react()],
  build: { target: "es2022", modulePreload: false },
});
