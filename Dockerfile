# Images for the jobs. tests/test_dockerfile.py executes the steps of `cpu` as they stand, on Debian without Docker; buildah
# has built `cpu` on a stand-in for PYTHON_IMAGE (debootstrap's bookworm with Python 3.11), in which `nsa doctor` ran. `gpu`
# and `trtllm` have not been built, and nothing of them has been tried on a GPU.
#
#   docker build --target cpu -t nemo_style_aligner:cpu .
#   docker build --target gpu -t nemo_style_aligner:gpu .              # torch's CUDA, this project's own layers and kernels
#   docker build --target trtllm -t nemo_style_aligner:trtllm .        # gpu + an environment with TensorRT-LLM beside it
#   docker run --rm --gpus all --shm-size 8g -v /data:/work nemo_style_aligner:gpu nsa doctor
#
# Jobs run as the user `aligner` (10001) in /work; a folder that is mounted there must be theirs, or run with --user.

ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

# ---- base: no Python package yet -------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS base
# g++ at run time, too: parts of engine and layers are compiled for the processor that they run on.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 aligner && install -d -o aligner /work && python3 -m venv /opt/venv
# Open MPI: more ranks than cores are allowed, and no rank is tied to one core.
ENV PATH=/opt/venv/bin:${PATH} \
    PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe \
    PRTE_MCA_hwloc_default_binding_policy=none
WORKDIR /opt/nemo_style_aligner

# ---- cpu -------------------------------------------------------------------------------------------
FROM base AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt --index-url ${TORCH_INDEX} torch
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[mpi]'
USER 10001
WORKDIR /work
CMD ["nsa", "doctor"]

# ---- gpu -------------------------------------------------------------------------------------------
# Transformer Engine is not in it: it would have to be compiled, and our own layers are as fast (docs/performance.md).
FROM base AS gpu
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt torch
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[mpi]'
USER 10001
WORKDIR /work
CMD ["nsa", "doctor", "--need", "gpu"]

# ---- trtllm ----------------------------------------------------------------------------------------
FROM gpu AS trtllm
ARG TRTLLM_VERSION=1.3.0rc24
USER 0
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libopenmpi-dev && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/trtllm
RUN /opt/trtllm/bin/pip install --no-cache-dir --pre --extra-index-url https://pypi.nvidia.com \
    "tensorrt-llm==${TRTLLM_VERSION}" ray==2.60.0
USER 10001
# Use it with trainer.ppo.trt_llm.enable=True trainer.ppo.trt_llm.sidecar_python=/opt/trtllm/bin/python
