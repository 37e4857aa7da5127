#!/bin/bash
# Builds Debian's package of Hearth from this checkout: deb.sh FOLDER [VERSION]. Prints its path. Needs dpkg-deb, and Python with
# pip, which makes the wheel that the package holds. DEB_KEY: gpg's key whose detached signature lies beside the package then.
set -euo pipefail

here=$(dirname "$(realpath "$0")") folder=$(realpath -m "$1")
python=${PYTHON:-python3}
version=${2:-$(sed -nE 's/^version = "(.*)"/\1/p' "$here/../pyproject.toml")}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tree=$scratch/tree shared=$scratch/tree/usr/share/hearth-home

mkdir -p "$scratch/source" "$shared" "$tree"/{DEBIAN,etc/hearth,lib/systemd/system,usr/lib/sysusers.d,usr/sbin,usr/share/doc/hearth-home}
cp -r "$here/.."/{agent,coordinator,hearth,pyproject.toml,README.md} "$scratch/source/"
find "$scratch/source" -name __pycache__ -prune -exec rm -rf {} +
"$python" -m pip --quiet --disable-pip-version-check wheel --no-deps --no-index --find-links "$here/../constraints.html" --wheel-dir "$shared" "$scratch/source"
install -m 644 "$here/../"constraints.{txt,html} "$shared/"
install -m 644 "$here/../README.md" "$here/../LICENSE" "$tree/usr/share/doc/hearth-home/"
install -m 755 "$here/install.sh" "$tree/usr/sbin/hearth-setup"
install -m 644 "$here/hearth.sysusers" "$tree/usr/lib/sysusers.d/hearth.conf"
for service in hearth-agent hearth-coordinator hearth-gateway; do
  install -m 644 "$here/$service.service" "$tree/lib/systemd/system/"
  install -m 644 "$here/$service.env" "$tree/etc/hearth/"
  echo "/etc/hearth/$service.env" >> "$tree/DEBIAN/conffiles" # edited ones survive an upgrade
done
sed "s/@VERSION@/$version/" "$here/debian/control" > "$tree/DEBIAN/control"
install -m 755 "$here/debian"/{postinst,prerm,postrm} "$tree/DEBIAN/"
mkdir -p "$folder"
package=$folder/hearth-home_${version}_all.deb
dpkg-deb --root-owner-group --build "$tree" "$package" > /dev/null
rm -f "$package.asc"
if [[ -n ${DEB_KEY:-} ]]; then
  gpg --quiet --batch --local-user "$DEB_KEY" --armor --output "$package.asc" --detach-sign "$package"
else
  echo "not signed: DEB_KEY names no key" >&2
fi
echo "$package"
