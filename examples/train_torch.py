"""Trains a small network with PyTorch: in one process or in torchrun's, with mixed precision on GPUs.

python examples/train_torch.py datasets/photos/1.0.0     # after a kill, it continues at the exact batch
torchrun --nproc_per_node 2 examples/train_torch.py datasets/photos/1.0.0
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: its defaults would keep a group, and DDP imports it later
from torch import nn

import imageshards

IMAGE_SIZE, FILTERS, LEARNING_RATE = 96, (16, 32, 64, 128), 0.002
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("dataset", help="a folder or URL that `imageshards write` published")
parser.add_argument("--out", type=Path, default="runs/torch", help="a folder of this run only, that all processes see")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
parser.add_argument("--checkpoint_steps", type=int, default=100, help="steps from one checkpoint to the next")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once: a checkpoint is complete or isn't there

# --- Device and processes: torchrun sets RANK, LOCAL_RANK and WORLD_SIZE.
on_gpu, is_distributed = torch.cuda.is_available(), "RANK" in os.environ
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
if is_distributed:
    dist.init_process_group("nccl" if on_gpu else "gloo")
rank, processes = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
tell = print if rank == 0 else lambda line: None
autocast = torch.autocast(device.type, torch.bfloat16, enabled=on_gpu)  # bfloat16 needs no GradScaler

# --- Input: each process reads its part of every batch, decoded in threads. A DataLoader's workers would add nothing.
options = {"global_batch_size": args.batch_size, "image_size": IMAGE_SIZE, "host": "auto"}
path = args.out / "checkpoint.pt"  # one file, which is replaced in one step
saved = torch.load(path, map_location=device, weights_only=True) if path.exists() else None
try:
    info = imageshards.load_info(args.dataset)
    train = imageshards.train_batches(info, "train", seed=args.seed, augment=imageshards.augment.flip_crop, **options)
    val = imageshards.as_torch(imageshards.eval_batches(info, "validation", **options))
    dataset = imageshards.as_torch(train)
    if saved:
        dataset.load_state_dict(saved["dataset"])
except imageshards.ImageShardsError as error:
    parser.error(str(error))
loader, val_loader = (torch.utils.data.DataLoader(data, batch_size=None, pin_memory=on_gpu) for data in (dataset, val))
mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (info.image.mean, info.image.std))

# --- Model: from images that were normalised on the device to logits.
torch.manual_seed(args.seed)
blocks = [
    nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.ReLU())
    for before, after in zip((info.image.channels, *FILTERS), FILTERS, strict=False)
]
for block in blocks:
    nn.init.kaiming_normal_(block[0].weight)  # for ReLU, as the default isn't
head = [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(FILTERS[-1], info.num_classes)]
net = nn.Sequential(*blocks, *head).to(device, memory_format=torch.channels_last)
model = nn.parallel.DistributedDataParallel(net) if is_distributed else net
optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE)

# --- Start, or continue after the last checkpoint.
args.out.mkdir(parents=True, exist_ok=True)
step, begin, loss_sum = saved["loop"] if saved else (0, 0, torch.zeros((), device=device))  # `begin`: an epoch
if saved:
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    tell(f"continuing after step {step}")


def save(epoch):
    """Write all that it takes to continue."""
    if is_distributed:
        dist.all_reduce(loss_sum.div_(processes))  # their mean, in each process: what one of them saves is true of all
    states = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "dataset": dataset.state_dict(step)}
    if rank == 0:
        torch.save({**states, "loop": (step, epoch, loss_sum)}, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)


def on_device(batch):
    """Images, normalised, labels, and in evaluation weights."""
    images, *others = (one.to(device, non_blocking=True) for one in batch)
    return (images / 255 - mean) / std, *others


# --- Train
for epoch in range(begin, args.epochs):
    net.train()
    for images, labels in map(on_device, loader):
        if step and step % args.checkpoint_steps == 0:  # not after the last step: then it follows the epoch's line
            save(epoch)
        torch.manual_seed((args.seed << 40) + step * processes + rank)  # Dropout's follows from the step, isn't saved
        with autocast:
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, loss_sum = step + 1, loss_sum + loss.detach()
    net.eval()
    sums = loss_sum * torch.tensor([1, 0, 0], device=device)
    with torch.inference_mode(), autocast:
        for images, labels, weights in map(on_device, val_loader):  # padding has weight 0
            logits = net(images)
            sums[1] += (nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
            sums[2] += ((logits.argmax(1) == labels) * weights).sum()
    if is_distributed:
        dist.all_reduce(sums)
    loss, (val_loss, accuracy) = sums[0] / len(train) / processes, sums[1:] / info.records("validation")
    tell(f"epoch {epoch + 1}: loss {loss:.4f}, val_loss {val_loss:.4f}, val_accuracy {accuracy:.4f}")
    loss_sum = torch.zeros_like(loss_sum)
    save(epoch + 1)

if rank == 0:
    torch.save(net.state_dict(), args.out / "model.pt")
    print(f"{args.epochs} epochs are trained: {args.out / 'model.pt'}")
if is_distributed:
    dist.barrier()  # no process leaves while another one still reduces
    del model  # it keeps the group, whose threads may crash a Python that ends before them
    dist.destroy_process_group()
