# Images for the jobs. NOT BUILT so far: these stages have never been run.
#
#   docker build --target cpu -t nemo_style_aligner:cpu .              # everything but GPUs; runs `make test`
#   docker build --target gpu -t nemo_style_aligner:gpu .              # training on GPUs, embedded engine
#   docker build --target trtllm -t nemo_style_aligner:trtllm .        # gpu + a sidecar environment with TensorRT-LLM

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
# NVIDIA's PyTorch image brings torch and the Transformer Engine that was built for it. Needs torch 2.9 or newer.
ARG PYTORCH_IMAGE=nvcr.io/nvidia/pytorch:25.12-py3
ARG TRTLLM_VERSION=1.3.0rc24
ARG MEGATRON_CORE_VERSION=0.16.1

# ---- cpu ------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nemo_style_aligner
COPY . .
RUN make install TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
ENV PATH=/opt/nemo_style_aligner/.venv/bin:${PATH}
CMD ["make", "test"]

# ---- gpu ------------------------------------------------------------------------------------------
FROM ${PYTORCH_IMAGE} AS gpu
ARG MEGATRON_CORE_VERSION
# The image allows TF32 in place of fp32. Turn this off, also for tools and scripts that do not do so themselves.
ENV TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0
WORKDIR /opt/nemo_style_aligner
COPY . .
# Keep the image's torch, Transformer Engine and numpy: pip would replace pre-releases that it considers too old. Not by
# `pip freeze`: it names the files that packages were installed from, which pip would want to read.
RUN pip list --format=freeze | grep -iE '^(torch|torchvision|transformer.engine|numpy|triton|nvidia-)' > /tmp/keep.txt \
    && pip install --no-cache-dir --no-deps "megatron-core==${MEGATRON_CORE_VERSION}" -e . \
    && pip install --no-cache-dir -c /tmp/keep.txt \
        "psutil>=5.9" "threadpoolctl>=3.5,<4" "einops>=0.8,<1" "tqdm>=4.66" "transformers>=5.18,<6" "tokenizers>=0.22" "sentencepiece>=0.2" \
        "jinja2>=3.1" "safetensors>=0.5" "gguf>=0.17,<1" "flask>=3.0,<4" \
        "prometheus_client>=0.20,<1" "pyyaml>=6.0.1" "hydra-core>=1.3,<1.4" "omegaconf>=2.3,<2.4" \
        "tensorboard>=2.16.2" "packaging>=23" "click>=8.4,<9" \
        mpi4py wandb

# ---- trtllm: TensorRT-LLM in an environment of its own --------------------------------------------
FROM gpu AS trtllm
ARG TRTLLM_VERSION
RUN apt-get update && apt-get install -y --no-install-recommends libopenmpi-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
# PIP_CONSTRAINT: NVIDIA's image pins packages for its own environment, not for this one.
RUN python3 -m venv /opt/trtllm \
    && PIP_CONSTRAINT= /opt/trtllm/bin/python -m pip install --no-cache-dir --pre \
        --extra-index-url https://pypi.nvidia.com "tensorrt-llm==${TRTLLM_VERSION}" ray
# Use it with trainer.ppo.trt_llm.enable=True trainer.ppo.trt_llm.sidecar_python=/opt/trtllm/bin/python
