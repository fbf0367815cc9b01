// Copies text to the clipboard.

export async function copyText(text: string): Promise<void> {
  // Absent where a page is served from afar without TLS.
  const clipboard = (navigator as Partial<Navigator>).clipboard;
  if (!clipboard) throw new Error("Browsers let a page copy only over https or from this machine.");
  await clipboard.writeText(text);
}
