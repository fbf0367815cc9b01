// The legend of the line chart, with the scores at the marked token.
import type { LineStyle } from "../../colour/lines";
import { usePage } from "../../state/page";
import { score } from "../../text/number";
import { useShownFocus, useView } from "../hooks";

export function LineLegend({ styles }: { styles: ReadonlyMap<string, LineStyle> }) {
  const page = usePage();
  const chosen = useView((state) => state.probe);
  const focus = useShownFocus();
  const transcript = focus ? page.transcripts.get(focus.run) : null;
  return (
    <ul className="keys" aria-label="Lines of the chart">
      {[...styles].map(([name, style]) => (
        <li key={name} data-chosen={name === chosen || undefined}>
          <button type="button" onClick={() => page.store.setState({ probe: name })}>
            <Stroke style={style} />
            <span>{name}</span>
            <span className="number">
              {focus && transcript ? score(transcript.scores.value(name, transcript.rowOf(focus.token))) : ""}
            </span>
          </button>
        </li>
      ))}
    </ul>
  );
}

/** A line as the chart draws it. */
export function Stroke({ style }: { style: LineStyle }) {
  return (
    <svg className="stroke" viewBox="0 0 18 6" aria-hidden="true">
      <line
        x1="0"
        x2="18"
        y1="3"
        y2="3"
        stroke={style.colour}
        strokeWidth="2"
        strokeDasharray={style.dash.join(" ")}
      />
    </svg>
  );
}
