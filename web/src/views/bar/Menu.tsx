// A button that opens a menu; Escape, a choice or leaving the menu closes it.
import {
  createContext,
  useCallback,
  useContext,
  useEffect,
  useId,
  useRef,
  useState,
  type ReactNode,
} from "react";

interface Props {
  title: ReactNode;
  label?: string;
  children: ReactNode;
}

const Closing = createContext<() => void>(() => undefined);

/** An entry of a menu; choosing it closes the menu. */
export function MenuItem({ onChoose, children }: { onChoose: () => void; children: ReactNode }) {
  const close = useContext(Closing);
  const choose = () => {
    close();
    onChoose();
  };
  return (
    <button type="button" className="menu-item" onClick={choose}>
      {children}
    </button>
  );
}

export function Menu({ title, label, children }: Props) {
  const [isOpen, setOpen] = useState(false);
  const root = useRef<HTMLDivElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  const id = useId();
  const close = useCallback(() => {
    setOpen(false);
    button.current?.focus();
  }, []);
  useEffect(() => {
    if (!isOpen) return;
    const outside = (event: Event) => {
      if (!root.current?.contains(event.target as Node)) setOpen(false);
    };
    document.addEventListener("pointerdown", outside);
    document.addEventListener("focusin", outside);
    return () => {
      document.removeEventListener("pointerdown", outside);
      document.removeEventListener("focusin", outside);
    };
  }, [isOpen]);
  const escape = (event: { key: string; stopPropagation(): void }) => {
    if (event.key !== "Escape" || !isOpen) return;
    event.stopPropagation();
    close();
  };
  return (
    // Key events of the buttons inside bubble here; the element itself is not interactive.
    // eslint-disable-next-line jsx-a11y/no-static-element-interactions
    <div className="menu" ref={root} onKeyDown={escape}>
      <button
        type="button"
        className="quiet"
        ref={button}
        aria-expanded={isOpen}
        aria-controls={id}
        aria-label={label}
        onClick={() => setOpen(!isOpen)}
      >
        {title}
      </button>
      <div className="menu-body" id={id} hidden={!isOpen}>
        {isOpen && <Closing value={close}>{children}</Closing>}
      </div>
    </div>
  );
}
