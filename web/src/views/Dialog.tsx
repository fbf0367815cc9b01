// A modal dialog.
import { useEffect, useId, useRef, type ReactNode } from "react";

interface Props {
  title: string;
  /** If omitted, the dialog cannot be dismissed. */
  onClose?: () => void;
  /** Shown beside the close button. */
  action?: ReactNode;
  children: ReactNode;
}

export function Dialog({ title, onClose, action, children }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => {
    const element = dialog.current;
    element?.showModal();
    return () => element?.close();
  }, []);
  return (
    <dialog
      ref={dialog}
      className="dialog"
      aria-labelledby={id}
      onCancel={(event) => {
        event.preventDefault();
        onClose?.();
      }}
    >
      <h2 id={id}>{title}</h2>
      {children}
      {onClose && (
        <p className="actions">
          {action}
          <button type="button" className="primary" onClick={onClose}>
            Close
          </button>
        </p>
      )}
    </dialog>
  );
}
