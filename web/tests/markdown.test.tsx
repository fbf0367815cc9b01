import { renderToStaticMarkup } from "react-dom/server";
import { describe, expect, it } from "vitest";
import { Markdown } from "../src/views/chat/Markdown";

const rendered = (text: string) => renderToStaticMarkup(<Markdown text={text} />);

describe("a model's Markdown", () => {
  it("is shown as paragraphs, lists, code and tables", () => {
    const text =
      "# Head\n\nOne **two** *three* `four`\n\n1. a\n2. b\n\n```c\nx < 1;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |";
    const found = rendered(text);
    expect(found).toContain("<h3>Head</h3>");
    expect(found).toContain("<strong>two</strong>");
    expect(found).toContain('<ol start="1"><li>a</li>');
    expect(found).toContain("<pre><code>x &lt; 1;</code></pre>");
    expect(found).toContain("<td>2</td>");
  });

  it.each([
    "<img src=x onerror=alert(1)>",
    "a <b onclick=alert(1)>b</b>",
    "<script>alert(1)</script>",
    "<style>*{display:none}</style>",
    "<!-- hidden -->",
    "[x](javascript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "![x](https://example.test/track.png)",
    "<iframe srcdoc='<script>1</script>'>",
  ])("never becomes markup: %s", (text) => {
    const found = rendered(text);
    const tags = [...found.matchAll(/<([a-z0-9]+)([^>]*)>/g)];
    for (const [, name, attributes] of tags) {
      expect(["div", "p", "span"]).toContain(name);
      expect(attributes).not.toMatch(/on\w+=|href|src/);
    }
  });

  it("shows a link's URL, and links only to the web", () => {
    const found = rendered("[bank](https://evil.test/)");
    expect(found).toContain('rel="noopener noreferrer nofollow"');
    expect(found).toContain("(https://evil.test/)");
  });

  it("shows entities and escapes as they were written", () => {
    expect(rendered("a &lt;b&gt; \\* c")).toContain("*");
    expect(rendered("`&lt;`")).toContain("<code>&amp;lt;</code>");
  });
});
