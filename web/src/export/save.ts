// Saves bytes as a download of the browser.

export function save(name: string, content: Blob): void {
  const url = URL.createObjectURL(content);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A file name made of the question's first words. */
export function fileName(user: string, ending: string): string {
  const words = user
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .replace(/^-+|-+$/g, "");
  return `clairai-${words.slice(0, 40).replace(/-+$/, "") || "run"}.${ending}`;
}
