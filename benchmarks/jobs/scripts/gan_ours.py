from data import digit_tensors, likeness

images, *_ = digit_tensors()

# --- job ---
import torch
from torch import nn, optim
from torch.nn.functional import binary_cross_entropy_with_logits

from pytorch_accelerated import Trainer


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, images):
        real, fake = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        fakes = self.generator(torch.randn(len(images), 16))
        frozen = {name: weight.detach() for name, weight in self.discriminator.named_parameters()}
        verdicts = torch.func.functional_call(self.discriminator, frozen, (fakes,))
        generator_loss = binary_cross_entropy_with_logits(verdicts, real)
        on_real, on_fakes = self.discriminator(images), self.discriminator(fakes.detach())
        real_loss = binary_cross_entropy_with_logits(on_real, real)
        fake_loss = binary_cross_entropy_with_logits(on_fakes, fake)
        return {"loss": generator_loss + real_loss + fake_loss}


gan = Gan()
optimizers = {
    "generator": optim.Adam(gan.generator.parameters(), 1e-3, betas=(0.5, 0.999)),
    "discriminator": optim.Adam(gan.discriminator.parameters(), 1e-3, betas=(0.5, 0.999)),
}
Trainer(gan, None, optimizers).train({"images": images}, 60, per_device_batch_size=64)
print("likeness:", likeness(gan.generator))
