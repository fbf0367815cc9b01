// The engine's status in one word, with details in a menu.
import type { EngineDescription } from "../../api/types";
import type { Connection } from "../../state/types";
import { count } from "../../text/number";
import { useView } from "../hooks";
import { Menu } from "./Menu";

export interface ShownStatus {
  word: string;
  tone: "good" | "busy" | "bad";
}

export function statusOf(connection: Connection): ShownStatus {
  if (connection.kind === "connecting") return { word: "connecting", tone: "busy" };
  if (connection.kind === "unreachable") return { word: "disconnected", tone: "bad" };
  const tones = { ready: "good", starting: "busy", degraded: "busy", failed: "bad" } as const;
  const { status } = connection.health;
  return { word: status, tone: tones[status] };
}

export function Status() {
  const connection = useView((state) => state.connection);
  const engine = useView((state) => state.engine);
  const { word, tone } = statusOf(connection);
  const title = (
    <span className="status" data-tone={tone}>
      <span className="status-dot" aria-hidden="true" />
      {word}
    </span>
  );
  return (
    <Menu title={title} label={`Engine: ${word}`}>
      <Facts connection={connection} engine={engine} />
    </Menu>
  );
}

function Facts({ connection, engine }: { connection: Connection; engine: EngineDescription | null }) {
  const health = connection.kind === "answered" ? connection.health : null;
  return (
    <dl className="facts">
      {health?.reason != null && <Fact name="Reason" value={health.reason} />}
      {health && <Fact name="clairai" value={health.version} />}
      {health?.replica != null && <Fact name="Replica" value={health.replica} />}
      {engine && (
        <>
          <Fact name="Model" value={engine.model} />
          {engine.cores && <Fact name="Engine cores" value={count(engine.cores.length)} />}
          <Fact name="Points" value={engine.points.join(", ")} />
          <Fact name="Rows delivered" value={count(engine.reader.delivered)} />
          <Fact name="Rows lost" value={count(engine.reader.lost)} />
          <Fact name="Lag" value={`${count(engine.reader.lag)} records`} />
          <Fact name="Ring" value={engine.reader.attached ? "attached" : "not attached"} />
        </>
      )}
      {!health && !engine && <Fact name="Server" value="no response yet" />}
    </dl>
  );
}

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </>
  );
}
