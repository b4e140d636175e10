# Chorus on a CPU: `docker build -t chorus-lora .`. docs/deploy/Dockerfile.cuda is the image for NVIDIA GPUs.
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/chorus
# The image's native libraries are for all processors, not for the one that builds it.
ENV PATH=/opt/chorus/bin:$PATH CHORUS_BUILD_LEVELS=all
# PyTorch's index of CPU builds. PyPI's build for x86-64 brings gigabytes of CUDA packages: `--build-arg TORCH_INDEX=` takes
# it. Another URL is that of a mirror.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.9,<2.14" "torchvision<0.29"
COPY . /src
RUN pip install --no-cache-dir "/src[stores,gateway,pull,vision,otel]"

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 1000 chorus && mkdir /state && chown chorus /state
COPY --from=build /opt/chorus /opt/chorus
ENV PATH=/opt/chorus/bin:$PATH
USER chorus
VOLUME /state
EXPOSE 8000
CMD ["chorus", "serve", "--host", "0.0.0.0"]
