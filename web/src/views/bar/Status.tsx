// Takes the picture of the server; says in one word how it stands, and in more words on demand.
import type { EngineDescription } from "../../api/types";
import type { Link } from "../../state/types";
import { count } from "../../text/number";
import { useView } from "../hooks";
import { Menu } from "./Menu";

export interface Standing {
  word: string;
  tone: "good" | "busy" | "bad";
}

export function standingOf(link: Link): Standing {
  if (link.kind === "connecting") return { word: "connecting", tone: "busy" };
  if (link.kind === "unreachable") return { word: "disconnected", tone: "bad" };
  const tones = { ready: "good", starting: "busy", degraded: "busy", failed: "bad" } as const;
  const { status } = link.health;
  return { word: status, tone: tones[status] };
}

export function Status() {
  const link = useView((state) => state.link);
  const engine = useView((state) => state.engine);
  const { word, tone } = standingOf(link);
  const title = (
    <span className="status" data-tone={tone}>
      <span className="status-dot" aria-hidden="true" />
      {word}
    </span>
  );
  return (
    <Menu title={title} label={`Engine: ${word}`}>
      <Facts link={link} engine={engine} />
    </Menu>
  );
}

function Facts({ link, engine }: { link: Link; engine: EngineDescription | null }) {
  const health = link.kind === "answered" ? link.health : null;
  return (
    <dl className="facts">
      {health?.reason != null && <Fact name="Because" value={health.reason} />}
      {health && <Fact name="clairai" value={health.version} />}
      {engine && (
        <>
          <Fact name="Model" value={engine.model} />
          <Fact name="Tap points" value={engine.points.join(", ")} />
          <Fact name="Rows delivered" value={count(engine.reader.delivered)} />
          <Fact name="Rows lost" value={count(engine.reader.lost)} />
          <Fact name="Lag" value={`${count(engine.reader.lag)} records`} />
          <Fact name="Ring" value={engine.reader.attached ? "attached" : "not attached"} />
        </>
      )}
      {!health && !engine && <Fact name="Server" value="no answer yet" />}
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
