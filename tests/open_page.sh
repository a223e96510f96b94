#!/usr/bin/env bash
# Opens a page in headless chromium: open_page.sh PAGE PICTURE TEXT... Fails unless the page draws itself (PICTURE is its
# screenshot), says nothing on its console and shows each TEXT.
set -euo pipefail
page=$(realpath "$1") picture=$2
shift 2
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
options=(--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --window-size=1200,2200
  "--user-data-dir=$folder/profile" --enable-logging=stderr)
rm -f "$picture"
timeout 300 "$browser" "${options[@]}" "--screenshot=$picture" "file://$page" 2>"$folder/log" >/dev/null
if [ "$(stat -c %s "$picture")" -lt 30000 ]; then echo "$picture: the page is all but empty"; exit 1; fi
if grep CONSOLE "$folder/log"; then exit 1; fi
timeout 300 "$browser" "${options[@]}" --dump-dom "file://$page" >"$folder/page" 2>/dev/null
for text; do
  grep -qF -- "$text" "$folder/page" || { echo "$page does not show: $text"; exit 1; }
done
