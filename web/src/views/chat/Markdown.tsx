// Renders a model's text as Markdown; HTML in it stays text, and nothing is loaded or run.
import { lexer, type MarkedToken, type Token, type Tokens } from "marked";
import { createElement, Fragment, useMemo, type ReactNode } from "react";

export function Markdown({ text }: { text: string }) {
  const tokens = useMemo(() => lexer(text), [text]);
  return <div className="markdown">{all(tokens)}</div>;
}

function all(tokens: readonly Token[] | undefined): ReactNode {
  return tokens?.map((token, i) => <Fragment key={i}>{shown(token as MarkedToken)}</Fragment>);
}

/** Elements are made from tokens, never from HTML; anything not listed here is shown verbatim. */
function shown(token: MarkedToken): ReactNode {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return createElement(`h${Math.min(6, token.depth + 2)}`, null, all(token.tokens));
    case "paragraph":
      return <p>{all(token.tokens)}</p>;
    case "text":
      return token.tokens ? all(token.tokens) : token.text;
    case "escape":
      return token.text;
    case "strong":
      return <strong>{all(token.tokens)}</strong>;
    case "em":
      return <em>{all(token.tokens)}</em>;
    case "del":
      return <del>{all(token.tokens)}</del>;
    case "br":
      return <br />;
    case "hr":
      return <hr />;
    case "codespan":
      return <code>{token.text}</code>;
    case "code":
      return (
        <pre>
          <code>{token.text}</code>
        </pre>
      );
    case "blockquote":
      return <blockquote>{all(token.tokens)}</blockquote>;
    case "list":
      return listed(token);
    case "table":
      return tabled(token);
    case "link":
      return linked(token);
    case "image":
      return <span className="faint">[image: {token.text}]</span>;
    default:
      return token.raw;
  }
}

function listed(token: Tokens.List): ReactNode {
  const items = token.items.map((item, i) => <li key={i}>{all(item.tokens)}</li>);
  return token.ordered ? <ol start={token.start === "" ? 1 : token.start}>{items}</ol> : <ul>{items}</ul>;
}

function tabled(token: Tokens.Table): ReactNode {
  const cells = (row: Tokens.TableCell[], Cell: "th" | "td") =>
    row.map((cell, i) => <Cell key={i}>{all(cell.tokens)}</Cell>);
  return (
    <table>
      <thead>
        <tr>{cells(token.header, "th")}</tr>
      </thead>
      <tbody>
        {token.rows.map((row, i) => (
          <tr key={i}>{cells(row, "td")}</tr>
        ))}
      </tbody>
    </table>
  );
}

/** The URL is shown, because a model can write one text and link to another. */
function linked(token: Tokens.Link): ReactNode {
  const isWeb = /^https?:\/\//i.test(token.href);
  const words = all(token.tokens);
  const hasOther = token.text !== token.href;
  if (!isWeb) return token.raw;
  return (
    <>
      <a href={token.href} target="_blank" rel="noopener noreferrer nofollow">
        {words}
      </a>
      {hasOther && <span className="faint"> ({token.href})</span>}
    </>
  );
}
