// ESLint: strict types, React hooks and accessibility.
import js from "@eslint/js";
import a11y from "eslint-plugin-jsx-a11y";
import hooks from "eslint-plugin-react-hooks";
import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["src/api/schema.d.ts", "node_modules", "dist"] },
  js.configs.recommended,
  ...tseslint.configs.strictTypeChecked,
  ...tseslint.configs.stylisticTypeChecked,
  { languageOptions: { parserOptions: { projectService: true, tsconfigRootDir: import.meta.dirname } } },
  { files: ["src/**/*.{ts,tsx}"], ...a11y.flatConfigs.strict },
  { files: ["src/**/*.{ts,tsx}"], ...hooks.configs.flat["recommended-latest"] },
  {
    rules: {
      "max-lines": ["error", { max: 300 }],
      "max-depth": ["error", 3],
      "no-console": "error",
      "@typescript-eslint/restrict-template-expressions": ["error", { allowNumber: true }],
      "@typescript-eslint/no-confusing-void-expression": ["error", { ignoreArrowShorthand: true }],
    },
  },
  {
    files: ["src/**/*.{ts,tsx}"],
    rules: {
      // Regions that scroll or handle arrow keys must be focusable.
      "jsx-a11y/no-noninteractive-tabindex": ["error", { tags: [], roles: ["group", "tabpanel"] }],
    },
  },
  { files: ["**/*.js", "**/*.mjs"], ...tseslint.configs.disableTypeChecked },
  { files: ["**/*.mjs"], languageOptions: { globals: { process: "readonly", URL: "readonly" } } },
);
