// One probe of the list: its name, quality and current score, and whether the chart shows it.
import { Fragment } from "react";
import type { ProbeInfo } from "../../api/types";
import type { LineStyle } from "../../colour/lines";
import { domainOf, fraction } from "../../colour/domain";
import { usePage } from "../../state/page";
import { toggledLine } from "../../state/store";
import { placeOf } from "../../text/point";
import { useView } from "../hooks";
import { Stroke } from "../charts/LineLegend";

interface Props {
  probe: ProbeInfo;
  style: LineStyle | undefined;
  isFull: boolean;
}

export function ProbeRow({ probe, style, isFull }: Props) {
  const page = usePage();
  const isChosen = useView((state) => state.probe === probe.name);
  const toggle = () => {
    const lines = toggledLine(page.store.getState().lines, probe.name);
    if (lines) page.store.setState({ lines });
  };
  return (
    <div className="probe" data-chosen={isChosen || undefined}>
      <label className="probe-name">
        <input
          type="radio"
          name="probe"
          checked={isChosen}
          onChange={() => page.store.setState({ probe: probe.name })}
        />
        <Name text={probe.name} />
        <Auroc value={probe.auroc} />
      </label>
      <label
        className="probe-line"
        title={style ? "In the chart" : isFull ? "The chart shows at most 8 probes" : "Add to the chart"}
      >
        <input type="checkbox" checked={style !== undefined} disabled={!style && isFull} onChange={toggle} />
        <span className="hidden">{probe.name} in the chart</span>
        {style ? <Stroke style={style} /> : <span className="no-stroke" aria-hidden="true" />}
      </label>
      <Meter probe={probe} />
      {isChosen && <Details probe={probe} />}
    </div>
  );
}

/** A long name may break after underscores and punctuation. */
function Name({ text }: { text: string }) {
  return (
    <span>
      {text.split(/(?<=[_./-])/).map((part, i) => (
        <Fragment key={i}>
          {i > 0 && <wbr />}
          {part}
        </Fragment>
      ))}
    </span>
  );
}

function Auroc({ value }: { value: number | null | undefined }) {
  if (value == null) return null;
  return (
    <span className="auroc" title="Area under the ROC curve on texts the probe was not trained on">
      <span className="hidden">AUROC </span>
      {value.toFixed(3)}
    </span>
  );
}

/** Updated by meters.ts, outside React. */
function Meter({ probe }: { probe: ProbeInfo }) {
  const domain = domainOf(probe);
  const left = probe.threshold === null ? null : `${100 * fraction(domain, probe.threshold)}%`;
  return (
    <div className="meter" data-probe={probe.name} aria-hidden="true">
      <span className="meter-fill" />
      {left !== null && <span className="meter-threshold" style={{ left }} />}
    </div>
  );
}

function Details({ probe }: { probe: ProbeInfo }) {
  return (
    <p className="probe-details">
      {probe.description ?? "No description."}{" "}
      <span className="faint">
        Read {placeOf(probe.point).where} ({probe.point}).
      </span>
    </p>
  );
}
