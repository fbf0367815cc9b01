// A field for a number; empty or incomplete input is null.

interface Props {
  title: string;
  value: number | null;
  onChange: (value: number | null) => void;
  placeholder?: string;
  min?: number;
  step?: number | "any";
  /** The title is for screen readers only. */
  isTitleHidden?: boolean;
}

export function NumberField({ title, value, onChange, isTitleHidden, step = "any", ...rest }: Props) {
  return (
    <label className="field">
      <span className={isTitleHidden ? "hidden" : undefined}>{title}</span>
      <input
        type="number"
        inputMode="decimal"
        step={step}
        {...rest}
        value={value ?? ""}
        onChange={(event) => {
          const number = event.target.valueAsNumber;
          onChange(Number.isNaN(number) ? null : number);
        }}
      />
    </label>
  );
}
