"""The page's style sheet: two sets of colours, wide tables scroll within themselves, long words break."""

from __future__ import annotations

_LIGHT = ("#2563eb", "#d97706", "#0d9488", "#c026d3", "#dc2626", "#64748b")
_DARK = ("#60a5fa", "#fbbf24", "#2dd4bf", "#e879f9", "#f87171", "#94a3b8")


def _palette(colours: tuple[str, ...]) -> str:
    return "".join(f"--c{place}:{colour};" for place, colour in enumerate(colours))


_CLASSES = "".join(
    f".s{place}{{stroke:var(--c{place})}}.f{place}{{fill:var(--c{place})}}.b{place}{{background:var(--c{place})}}"
    for place in range(6)
)

STYLE = (
    ":root{color-scheme:light dark;--page:#fbfbfa;--card:#ffffff;--text:#1c1c1a;--soft:#5f5f5a;--grid:#e4e4e0;"
    "--idle:#eeeeea;--on:#ffffff;" + _palette(_LIGHT) + "}"
    "@media (prefers-color-scheme:dark){:root{--page:#141416;--card:#1d1d20;--text:#ececea;--soft:#a3a39e;"
    "--grid:#35353a;--idle:#2a2a2e;--on:#141416;" + _palette(_DARK) + "}}"
    "*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--text);"
    "font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
    "main{max-width:1040px;margin:0 auto;padding:24px 16px 64px}"
    "header{margin:0 0 16px}h1{font-size:24px;margin:8px 0 6px;overflow-wrap:anywhere}"
    "h2{font-size:17px;margin:0 0 10px}"
    "h3{font-size:14px;margin:0 0 8px;overflow-wrap:anywhere}"
    "section{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:16px 18px;margin:0 0 16px}"
    "svg text{font-size:12px;fill:var(--soft)}svg text.on{fill:var(--on);font-size:11px;pointer-events:none}"
    ".timeline{display:block;width:100%;min-width:640px;height:auto}.idle{fill:var(--idle)}.late{opacity:.72}"
    # a chart: unit above, labels of y at the left, of x below
    ".chart{margin:0;display:grid;grid-template-columns:auto minmax(0,1fr);gap:0 8px;font-size:12px;"
    "color:var(--soft)}figcaption{grid-column:1/3;margin-bottom:8px}"
    ".y{position:relative}.y span{position:absolute;right:0;transform:translateY(50%);line-height:1}"
    ".y .widest{position:static;visibility:hidden;display:block}"
    ".plot{display:block;width:100%;height:230px;overflow:visible}"
    ".x{grid-column:2;position:relative;height:20px;margin-top:6px}"
    ".x span{position:absolute;transform:translateX(-50%)}.x-title{grid-column:2;text-align:center}"
    ".plot *{vector-effect:non-scaling-stroke}.grid{stroke:var(--grid)}"
    ".line{fill:none;stroke-width:1.8;stroke-linejoin:round}.faint{opacity:.3;stroke-width:1}"
    ".point{stroke-linecap:round;stroke-width:7}.clear{opacity:0;stroke-width:11}.clear:hover{opacity:1}"
    ".bars{display:grid;grid-template-columns:fit-content(40%) minmax(0,1fr);gap:6px 10px;font-size:13px}"
    ".bars .name{text-align:right;color:var(--soft);overflow-wrap:anywhere}"
    ".track{display:flex;align-items:center;gap:8px;white-space:nowrap}"
    ".bar{height:17px;min-width:2px;border-radius:2px}"
    ".stack{display:flex;gap:2px;height:30px;font-size:11px;line-height:30px;text-align:center;color:var(--on)}"
    ".stack span{border-radius:2px;min-width:1px;overflow:hidden}"
    ".beside{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:18px}.cell{min-width:0}"
    ".scroll{overflow-x:auto;margin-top:8px}table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid var(--grid);vertical-align:top;"
    "font-variant-numeric:tabular-nums;overflow-wrap:anywhere;min-width:90px}"
    "th{font-weight:500;color:var(--soft)}"
    ".figures td{text-align:right}.figures th:not(:first-child){text-align:right}details{margin-top:10px}"
    ".even{table-layout:fixed}.even th[scope=row]{width:200px}th[scope=row]{min-width:140px}"
    ".legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;"
    "padding:0;margin:0 0 8px;font-size:13px;overflow-wrap:anywhere}"
    ".key{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:7px}"
    ".missing,.what{color:var(--soft);margin:0 0 8px;font-size:13px;overflow-wrap:anywhere}summary{cursor:pointer}"
    "@media (max-width:560px){.even th[scope=row]{width:110px}th[scope=row]{min-width:96px}"
    "th,td{min-width:56px;padding-right:8px}section{padding:12px}}" + _CLASSES
)
