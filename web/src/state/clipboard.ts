// Copies text to the clipboard.

export async function copyText(text: string): Promise<void> {
  // Undefined on pages from another machine without TLS.
  const clipboard = (navigator as Partial<Navigator>).clipboard;
  if (!clipboard) throw new Error("Browsers let a page copy only over https or from this machine.");
  await clipboard.writeText(text);
}
