// Copies text to the clipboard.

export async function copyText(text: string): Promise<void> {
  // Undefined on pages from another machine without TLS.
  const clipboard = (navigator as Partial<Navigator>).clipboard;
  if (!clipboard) throw new Error("Browsers allow copying only over HTTPS or from this machine.");
  await clipboard.writeText(text);
}
