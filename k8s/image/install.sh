#!/bin/sh
# Install crosskv into a new virtual environment. usage: install.sh cpu|cuda DIRECTORY
# Run from the repository's root. The image is built with it, and any machine with Python 3.11 can run it.
set -eu
device=$1
prefix=$2
python3 -m venv "$prefix"
pip="$prefix/bin/pip --disable-pip-version-check --no-cache-dir"
case $device in
  # PyPI's torch for Linux brings CUDA along, several gigabytes of it. What torch needs comes from PyPI, below: PyTorch's
  # own index has other versions of it than the constraints.
  cpu)
    index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
    $pip install -c constraints.txt --no-deps --index-url "$index" torch
    ;;
  cuda) $pip install -c constraints.txt torch ;;
  *) echo "install.sh: the device is cpu or cuda, not $device" >&2; exit 2 ;;
esac
$pip install -c constraints.txt .
"$prefix/bin/python" -c "import torch; assert ('$device' == 'cuda') == (torch.version.cuda is not None), torch.__version__"
