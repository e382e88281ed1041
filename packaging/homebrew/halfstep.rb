# The formula for Homebrew. packaging/recipes.sh fills in the marks for a release.
class Halfstep < Formula
  desc "Optimizer steps on weights and states stored in 32, 16, 8 or 4 bits"
  homepage "@HOMEPAGE@"
  url "@URL@"
  sha256 "@SHA256@"
  license "Apache-2.0"

  depends_on "cmake" => :build
  depends_on "pkgconf" => :test
  depends_on "jansson"
  depends_on "onednn"

  uses_from_macos "zlib"

  on_macos do
    depends_on "libomp"
  end

  def install
    system "cmake", "-S", ".", "-B", "build", "-DHALFSTEP_TOOLS=ON", "-DHALFSTEP_MPI=OFF", *std_cmake_args
    system "cmake", "--build", "build"
    system "cmake", "--install", "build"
    pkgshare.install "examples/embed.c"
  end

  test do
    flags = shell_output("pkgconf --cflags --libs halfstep").chomp.split
    system ENV.cc, pkgshare/"embed.c", "-o", "embed", *flags, "-Wl,-rpath,#{lib}"
    system "./embed"
    assert_match(/^ok: /, shell_output("#{bin}/halfstep verify"))
    (testpath/"text").write "An update is smaller than half a unit in the last place. " * 200
    system bin/"halfstep", "train", "lm", "--data", "text", "--recipe", "adamw/bf16-sr/int8", "--steps", "5"
  end
end
