// Reads this page's own script and style sheet, with the fonts inlined, for the HTML export.
import { closable, type Parts } from "./html";

export async function ownParts(target: Document): Promise<Parts> {
  const script = target.querySelector<HTMLScriptElement>("script[type=module][src]");
  const style = target.querySelector<HTMLLinkElement>("link[rel=stylesheet]");
  if (!script || !style)
    throw new Error("This page was not built, so it cannot be exported: run the build first.");
  const [code, css] = await Promise.all([text(script.src), text(style.href)]);
  return { script: code, style: await withFonts(css, style.href) };
}

/** The source expression that allows exactly this script in the policy. */
export async function scriptSource(script: string): Promise<string> {
  // Undefined on pages from another machine without TLS.
  const subtle = (crypto as Partial<Crypto>).subtle;
  if (!subtle) return "'unsafe-inline'";
  const digest = await subtle.digest("SHA-256", new TextEncoder().encode(closable(script)));
  return `'sha256-${base64(new Uint8Array(digest))}'`;
}

async function withFonts(css: string, base: string): Promise<string> {
  const found = [...css.matchAll(/url\(["']?([^"')]+\.woff2)["']?\)/g)];
  let made = css;
  for (const [whole, path = ""] of found) {
    const bytes = await (await fetch(new URL(path, base))).arrayBuffer();
    made = made.replaceAll(whole, `url(data:font/woff2;base64,${base64(new Uint8Array(bytes))})`);
  }
  return made;
}

async function text(url: string): Promise<string> {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`The server did not return ${url} (${answer.status}).`);
  return answer.text();
}

function base64(bytes: Uint8Array): string {
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary);
}
