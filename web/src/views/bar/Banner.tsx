// The message across the page about a problem of the server or the engine.
import { usePage } from "../../state/page";
import type { State } from "../../state/types";
import { count } from "../../text/number";
import { sentence } from "../../text/sentence";
import { useView } from "../hooks";
import { TiersNotice } from "../steer/TiersNotice";

interface Message {
  tone: "busy" | "bad";
  title: string;
  text: string;
}

export function messageOf(state: Pick<State, "connection" | "engine" | "isFrozen">): Message | null {
  const { connection, engine } = state;
  if (state.isFrozen) return null;
  if (connection.kind === "connecting") return { tone: "busy", title: "Connecting", text: "to the server." };
  if (connection.kind === "unreachable") {
    return {
      tone: "bad",
      title: "Disconnected.",
      text: "The server does not respond. The page keeps retrying; its content stays.",
    };
  }
  const { status, reason } = connection.health;
  if (status === "starting") {
    return {
      tone: "busy",
      title: "The engine is starting.",
      text: sentence(reason ?? "Loading the model takes a moment."),
    };
  }
  if (status === "failed")
    return { tone: "bad", title: "The engine has failed.", text: sentence(reason ?? "No reason was given.") };
  if (status === "degraded") {
    const text = sentence(reason ?? "No reason was given.");
    return { tone: "busy", title: "Degraded: answers work, scores may be missing.", text };
  }
  if (engine && engine.reader.lost > 0) {
    const text = `${count(engine.reader.lost)} rows were lost since the server started.`;
    return { tone: "busy", title: "Scores were lost.", text };
  }
  return null;
}

export function Banner() {
  const page = usePage();
  const connection = useView((state) => state.connection);
  const engine = useView((state) => state.engine);
  const isFrozen = useView((state) => state.isFrozen);
  const notice = useView((state) => state.notice);
  const message = messageOf({ connection, engine, isFrozen });
  return (
    <div className="banners">
      <div role="status">
        {message && (
          <p className="banner" data-tone={message.tone}>
            <strong>{message.title}</strong> {message.text}
          </p>
        )}
        {notice !== null && (
          <p className="banner" data-tone="busy">
            {notice}{" "}
            <button type="button" className="quiet" onClick={() => page.store.setState({ notice: null })}>
              Close
            </button>
          </p>
        )}
      </div>
      <TiersNotice />
    </div>
  );
}
