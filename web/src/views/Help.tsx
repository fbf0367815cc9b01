// The dialog that lists the keyboard shortcuts.
import { usePage } from "../state/page";
import { Dialog } from "./Dialog";
import { useView } from "./hooks";

const KEYS: readonly (readonly [string, string])[] = [
  ["← →", "move from token to token; with Shift, ten at a time"],
  ["↑ ↓", "in the tokens, move by line"],
  ["Home End", "first and last token"],
  ["Enter", "pin or unpin the marked token"],
  ["Esc", "unpin the token"],
  ["p P", "next and previous probe"],
  ["n N", "next and previous crossing of the chosen probe's threshold"],
  ["/", "search probes"],
  ["m", "write a message"],
  ["s", "open or close the steering panel"],
  ["+ − 0", "zoom the charts in around the marked token, zoom out, show all"],
];

export function Help({ onClose }: { onClose: () => void }) {
  const page = usePage();
  const hasShortcuts = useView((state) => state.hasShortcuts);
  return (
    <Dialog title="Keyboard shortcuts" onClose={onClose}>
      <dl className="facts">
        {KEYS.map(([key, text]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
      <label className="menu-item">
        <input
          type="checkbox"
          checked={hasShortcuts}
          onChange={(event) => page.store.setState({ hasShortcuts: event.target.checked })}
        />
        Single-letter shortcuts
      </label>
    </Dialog>
  );
}
