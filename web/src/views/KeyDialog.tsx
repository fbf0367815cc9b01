// The dialog that asks for the API key.
import { useState } from "react";
import { usePage } from "../state/page";
import { Dialog } from "./Dialog";
import { useView } from "./hooks";

export function KeyDialog() {
  const page = usePage();
  const key = useView((state) => state.key);
  const [text, setText] = useState("");
  if (!key.isNeeded) return null;
  return (
    <Dialog title="API key">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (text.trim() !== "") page.giveKey(text.trim());
        }}
      >
        <p>
          {key.wasRefused
            ? "That key was not accepted. Check the key that the server was started with, and try again."
            : "This server was started with an API key. It is kept until this tab is closed."}
        </p>
        <label className="field" htmlFor="api-key">
          Key
        </label>
        <input
          id="api-key"
          type="password"
          autoComplete="off"
          value={text}
          aria-invalid={key.wasRefused}
          onChange={(event) => setText(event.target.value)}
        />
        <p className="actions">
          <button type="submit" className="primary" disabled={text.trim() === ""}>
            Connect
          </button>
        </p>
      </form>
    </Dialog>
  );
}
