// The exact scores of all probes for one token, for two runs where they are compared.
import type { ProbeInfo } from "../../api/types";
import { domainOf, isOver, position } from "../../colour/domain";
import { swatch } from "../../colour/ramp";
import type { Transcript } from "../../data/transcript";
import { usePage } from "../../state/page";
import { score, signed } from "../../text/number";
import { useTheme, useView } from "../hooks";

interface Props {
  probes: readonly ProbeInfo[];
  transcript: Transcript;
  row: number;
  other: Transcript | null;
  otherRow: number | null;
  /** Whether `transcript` is run A of a comparison. */
  isFirst: boolean;
}

const ROWS_PER_COLUMN = 22;

export function ScoreRows({ probes, transcript, row, other, otherRow, isFirst }: Props) {
  const columns = Math.min(3, Math.ceil(probes.length / ROWS_PER_COLUMN));
  return (
    <ul className="score-rows" data-columns={columns}>
      {probes.map((probe) => {
        const here = transcript.scores.value(probe.name, row);
        const there = other && otherRow !== null ? other.scores.value(probe.name, otherRow) : NaN;
        const [a, b] = isFirst ? [here, there] : [there, here];
        return <ScoreRow key={probe.name} probe={probe} value={here} pair={other ? [a, b] : null} />;
      })}
    </ul>
  );
}

function ScoreRow({
  probe,
  value,
  pair,
}: {
  probe: ProbeInfo;
  value: number;
  pair: [number, number] | null;
}) {
  const page = usePage();
  const theme = useTheme();
  const isChosen = useView((state) => state.probe === probe.name);
  const over = isOver(probe.threshold, value);
  const fill = Number.isNaN(value) ? "transparent" : swatch(theme, position(domainOf(probe), value)).fill;
  return (
    <li data-chosen={isChosen || undefined} data-over={over || undefined}>
      <button type="button" onClick={() => page.store.setState({ probe: probe.name })}>
        <span className="dab" style={{ backgroundColor: fill }} aria-hidden="true" />
        <span className="score-name">{probe.name}</span>
        {pair ? <Pair pair={pair} /> : <Exact value={value} />}
        {over && <span className="hidden">over its threshold</span>}
      </button>
    </li>
  );
}

/** A rounded score, with all digits as its title. */
function Exact({ value }: { value: number }) {
  return (
    <span className="number" title={Number.isNaN(value) ? "no score" : String(value)}>
      {score(value)}
    </span>
  );
}

function Pair({ pair: [a, b] }: { pair: [number, number] }) {
  return (
    <span className="number pair">
      <Exact value={a} />
      <Exact value={b} />
      <span className="faint">{Number.isNaN(b - a) ? "–" : signed(b - a)}</span>
    </span>
  );
}
