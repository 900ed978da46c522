# Sourced by test.sh: a browser and its driver, which open the page of `pasa diagnose` in the tests.

need_browser() {
  command -v chromedriver >/dev/null && command -v chromium chromium-browser google-chrome >/dev/null && return
  local packages=(chromium chromium-driver) apt=(apt-get)
  ((EUID == 0)) || apt=(sudo -n apt-get)
  "${apt[@]}" update -qq && "${apt[@]}" install -y -qq --no-install-recommends "${packages[@]}" || {
    echo "test.sh: the tests need a browser and its driver, which could not be installed from here;" \
      "on Debian, as root: apt-get install --no-install-recommends ${packages[*]}" >&2
    return 1
  }
}
