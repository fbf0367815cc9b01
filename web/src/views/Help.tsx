// The dialog that lists the keyboard shortcuts.
import { usePage } from "../state/page";
import { Dialog } from "./Dialog";
import { useView } from "./hooks";

const KEYS: readonly (readonly [string, string])[] = [
  ["← →", "move from token to token; with Shift, ten at a time"],
  ["↑ ↓", "in the tokens, move by line"],
  ["Home End", "first and last token"],
  ["Enter", "pin the token that is pointed at, or let it go"],
  ["Esc", "let go of the pinned token"],
  ["p P", "next and previous probe"],
  ["n N", "next and previous crossing of the chosen probe's threshold"],
  ["/", "search probes"],
  ["m", "write a message"],
  ["s", "steering, open and closed"],
  ["+ − 0", "zoom chart and matrix around the token, and out again"],
];

export function Help({ onClose }: { onClose: () => void }) {
  const page = usePage();
  const hasShortcuts = useView((state) => state.hasShortcuts);
  return (
    <Dialog title="Keyboard" onClose={onClose}>
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
        Single-letter keys
      </label>
    </Dialog>
  );
}
