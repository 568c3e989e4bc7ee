"""The look of report.html."""

STYLE = """
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; color: #1d2329; background: #fff;
       max-width: 1360px; margin: 0 auto; padding: 24px 28px 60px; }
h1 { font-size: 24px; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; padding-bottom: 4px; border-bottom: 1px solid #d5dade; }
h3 { font-size: 14px; margin: 0 0 2px; }
.status { font-size: 13px; font-weight: 600; padding: 3px 10px; border-radius: 10px; vertical-align: middle;
          background: #e6e9ec; color: #333c44; }
.status.completed { background: #d8f0e4; color: #0a5a3c; }
.status.failed { background: #fbe0d8; color: #8c2f00; }
.error { background: #fdf1ec; border-left: 4px solid #d55e00; padding: 8px 12px; margin: 8px 0;
         overflow-wrap: anywhere; }
.advice { color: #56606b; margin: 6px 0 0; }
.none { color: #56606b; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 20px; }
.card { flex: 1 1 22%; min-width: 200px; border: 1px solid #d5dade; border-radius: 6px; padding: 10px 14px; }
.what, .note { font-size: 12.5px; color: #56606b; }
.figure { font-size: 21px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.charts { display: flex; flex-wrap: wrap; gap: 22px 28px; }
figure { margin: 0; flex: 0 0 calc(50% - 14px); min-width: 0; }
@media (max-width: 900px) { figure { flex-basis: 100%; } }
svg { width: 100%; height: auto; display: block; }
svg .tip:hover { opacity: 1; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-bottom: 16px; }
th { text-align: left; font-weight: 600; }
th, td { padding: 4px 14px 4px 0; vertical-align: top; border-bottom: 1px solid #e6e9ec; font-size: 14px; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 200px; font: 12.5px/1.4 ui-monospace, monospace; }
pre { background: #f5f7f8; padding: 14px; border-radius: 6px; overflow-x: auto;
      font: 12.5px/1.45 ui-monospace, monospace; }
"""
